"""The reducer: gradients in buckets, launched in order, waited for at the end of backward."""
