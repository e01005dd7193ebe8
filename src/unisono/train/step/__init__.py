"""One step under the exact strategy: gradients, their sum, the update."""
