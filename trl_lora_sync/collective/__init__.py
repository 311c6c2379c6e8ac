"""What several processes of one training do together: one outcome for all, and what is divided among them."""
