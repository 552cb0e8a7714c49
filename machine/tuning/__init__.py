"""What is fastest here: recordings, replays in simulated time, the contest of settings."""
