"""The apps that Flower starts on a server and on devices."""
