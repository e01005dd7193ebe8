"""The live page of a run: what its folder and its coordinator tell, in a browser."""
