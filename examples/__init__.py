"""Apps to run and to copy from: `quickstart` is one file, the others have a README each."""
