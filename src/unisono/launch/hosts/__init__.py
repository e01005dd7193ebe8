"""Other hosts of a job, whose agents one launcher starts over ssh."""
