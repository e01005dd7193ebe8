"""Starting workers, watching them, and saying why they ended."""
