"""Names the colours of all pictures: those of Okabe and Ito, told apart by all eyes."""

__all__ = ["BLUE", "GREEN", "GREY", "OKABE_ITO", "ORANGE", "PURPLE", "RED", "SKY"]

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
RED, SKY, GREY = "#D55E00", "#56B4E9", "#7F7F7F"
OKABE_ITO = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY, GREY)
