"""Other people's loops on the verbs of a run: each adapter is a leaf, and nothing of Unisono knows it."""
