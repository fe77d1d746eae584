"""What each method costs, as ratios to the plain model measured in the same run."""
