"""Which cores of a host its workers run on."""
