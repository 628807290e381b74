"""An epoch over sequences of many lengths, as the mean of the steps that are simulated of it (SeqPoint)."""
