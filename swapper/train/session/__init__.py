"""The lifecycle of a training session: planned, opened (new or resumed), stepped, laid out anew, closed."""
