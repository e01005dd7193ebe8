"""Second-order methods: K-FAC, and measurements of curvature."""
