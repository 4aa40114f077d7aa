"""`mlx-kda bench`: this package beside mlx-lm on one machine, timed in turns."""
