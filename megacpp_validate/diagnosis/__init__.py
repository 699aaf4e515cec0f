"""One table: what a failure says, its cause, component and next step."""
