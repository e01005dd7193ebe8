"""Jobs for Kubernetes: their manifests."""
