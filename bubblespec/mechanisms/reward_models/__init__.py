"""Reward models: sequence classification models with one label, which score in idle time."""
