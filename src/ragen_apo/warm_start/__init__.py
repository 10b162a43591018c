"""From an untrained model to a reference policy: copying, then demonstrations."""
