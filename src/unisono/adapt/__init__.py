"""Policies that adapt a training while it runs, and the measurements that they see."""
