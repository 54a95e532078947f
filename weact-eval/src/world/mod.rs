//! The toy research world.
