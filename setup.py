"""What setup.cfg cannot say."""

from setuptools import Distribution, setup

# setuptools copies `data_files` in an editable install, too, but asks for them by this name.
Distribution.has_data = Distribution.has_data_files
setup()
