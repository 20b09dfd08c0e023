"""Measurement: tasks, accuracy and fidelity runs, speed, analysis and one report."""
