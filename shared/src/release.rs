//! Published facts of the Kimi K3 release, embedded from `manifests/`.
