//! Terminal habits: outcomes and exit codes, atomic output files, progress and log on stderr.
