"""Plans, opens, resumes, steps, lays out again and closes a training session."""
