"""Preference losses: pairs of a chosen and a rejected response, or single responses with a verdict."""
