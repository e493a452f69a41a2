"""What runs in the driver's process: it starts actors, sends them steps and reads results."""
