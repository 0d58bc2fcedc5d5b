"""Who may ask, and how much: API keys, quotas, tiers, browsers, bounds on bodies, and their settings."""
