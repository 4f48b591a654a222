"""What the pages of hotloop share: a socket with a reason where there is none, who may ask, and the headers."""
