"""What a run is told before it starts: variables of the launcher, batch scaling, torch's switches."""
