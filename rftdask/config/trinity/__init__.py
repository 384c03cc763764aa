"""Configurations of Trinity-RFT: its keys, its defaults, and their translation to ours."""
