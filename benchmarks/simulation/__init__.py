"""The core in virtual time against peers' policies and the exact optimum. No process, no clock."""
