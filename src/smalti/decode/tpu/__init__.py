"""The decode kernel for TPUs."""
