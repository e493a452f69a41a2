"""What an actor's loss needs: the log of what was made, snapshots of it, and another plan."""
