"""A quantised copy of the policy that drafts for it, with the noise of the row itself."""
