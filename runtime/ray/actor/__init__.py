"""What runs in an actor's process: its plan, its messages, its arrays and its compiled step."""
