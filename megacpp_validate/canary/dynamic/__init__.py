"""The dynamic tier: two stacks as the probes saw them, who is to blame for what changed, and what to do next."""
