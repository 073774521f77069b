"""PTX text, what it computes and what it costs, before anything runs."""
