#![no_std]
//! Empty.
