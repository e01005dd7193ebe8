"""The configuration of a run before it starts: variables of the launcher, batch scaling, torch's switches."""
