"""`shardwright doctor`: command.py, and one file for each section of its report."""
