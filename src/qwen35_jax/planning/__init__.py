"""What a model costs before anything runs: closed forms, and programs compiled for TPUs that are not there."""
