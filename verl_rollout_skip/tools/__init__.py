"""What users do with recordings: statistics, comparison, export, copies, pruning, import and resume."""
