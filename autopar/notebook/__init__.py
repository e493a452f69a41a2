"""What notebooks show of plans, steps, timelines, differences and clusters: pages of HTML."""
