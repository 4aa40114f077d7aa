// In place of MLX's file, which overloads on address spaces: enough of complex64_t to compile
// MLX's utilities and to move complex numbers about.
#pragma once

struct complex64_t {
  float real, imag;
  complex64_t() = default;
  constexpr complex64_t(float r, float i = 0.0f) : real(r), imag(i) {}
};
constexpr complex64_t operator+(complex64_t a, complex64_t b) {
  return complex64_t(a.real + b.real, a.imag + b.imag);
}
constexpr complex64_t operator-(complex64_t a, complex64_t b) {
  return complex64_t(a.real - b.real, a.imag - b.imag);
}
constexpr complex64_t operator*(complex64_t a, complex64_t b) {
  return complex64_t(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real);
}
template <typename T> struct complex_t : complex64_t {
  using complex64_t::complex64_t;
};
// Ordered by the real part, then by the imaginary.
constexpr bool operator<(complex64_t a, complex64_t b) {
  return a.real < b.real || (a.real == b.real && a.imag < b.imag);
}
constexpr bool operator>(complex64_t a, complex64_t b) { return b < a; }
constexpr bool operator==(complex64_t a, complex64_t b) {
  return a.real == b.real && a.imag == b.imag;
}
