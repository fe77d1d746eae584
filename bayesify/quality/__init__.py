"""How good the uncertainty is: metrics, temperature, plots, the report."""
