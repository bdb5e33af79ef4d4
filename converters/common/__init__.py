"""What every command needs: atomic files, progress, batch scripts, the entry point."""
