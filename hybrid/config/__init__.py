"""Configuration: one JSON file and flags in, one frozen RunConfig out; imports neither torch nor deepspeed."""
