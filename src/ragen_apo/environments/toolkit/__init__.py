"""What environments are made of; none is needed to write one."""
