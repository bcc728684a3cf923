"""The decode loop, the public API and the text around it; knows stages only by address."""
