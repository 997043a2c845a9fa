// Package keys is what a sale's pods and its checkout share: the token by which pods know the checkout, and the keys that sign
// reservations. There are three of each: pods sign with the current one, and accept the next one already and the previous one
// still, so that pods, and the checkout, may learn of a rotation at different times.
package keys

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"time"
)

// FileName is the name of the file in the pods' Secret.
const FileName = "keys.json"

// tokenPrefix lets secret scanners, and people, tell what they found.
const tokenPrefix = "fsc_"

// Pair is one generation.
type Pair struct {
	CheckoutToken string `json:"checkoutToken"` // fsc_ and 52 letters of base32: 256 random bits
	SigningSeed   string `json:"signingSeed"`   // of Ed25519 (RFC 8032), in base64
}

// Set is what the file holds.
type Set struct {
	Generation int64 `json:"generation"` // of Current
	Previous   *Pair `json:"previous,omitempty"`
	Current    Pair  `json:"current"`
	Next       Pair  `json:"next"`
}

func newPair() Pair {
	seed := make([]byte, ed25519.SeedSize)
	_, _ = rand.Read(seed) // never fails
	return Pair{CheckoutToken: tokenPrefix + strings.ToLower(rand.Text()+rand.Text()), SigningSeed: base64.StdEncoding.EncodeToString(seed)}
}

// New makes the first set, of a generation.
func New(generation int64) Set {
	return Set{Generation: generation, Current: newPair(), Next: newPair()}
}

// Rotate makes the next one current, under a new generation.
func (s Set) Rotate(generation int64) Set {
	previous := s.Current
	return Set{Generation: generation, Previous: &previous, Current: s.Next, Next: newPair()}
}

// Encode gives the file.
func (s Set) Encode() []byte {
	b, err := json.Marshal(s)
	if err != nil {
		panic(fmt.Sprintf("encoding keys: %v", err)) // of plain values
	}
	return b
}

// Decode reads the file. Its error tells nothing of what is in it.
func Decode(file []byte) (Set, error) {
	var s Set
	if err := json.Unmarshal(file, &s); err != nil {
		return s, errors.New("the keys are not JSON as made by the operator or by reserver keys")
	}
	_, err := s.ring()
	return s, err
}

func (s Set) ring() (*Ring, error) {
	r := &Ring{}
	for _, p := range []*Pair{&s.Current, &s.Next, s.Previous} { // current first
		if p == nil {
			continue
		}
		seed, err := base64.StdEncoding.DecodeString(p.SigningSeed)
		if err != nil || len(seed) != ed25519.SeedSize {
			return nil, errors.New("a signingSeed is not 32 bytes in base64")
		}
		if !IsCheckoutToken(p.CheckoutToken) || len(p.CheckoutToken) < 30 {
			return nil, errors.New("a checkoutToken does not begin with " + tokenPrefix + " or is too short")
		}
		private := ed25519.NewKeyFromSeed(seed)
		public := private.Public().(ed25519.PublicKey)
		r.tokens = append(r.tokens, sha256.Sum256([]byte(p.CheckoutToken)))
		r.Keys = append(r.Keys, Key{ID: thumbprint(public), Private: private, Public: public})
	}
	return r, nil
}

// thumbprint is the JWK's (RFC 7638, RFC 8037).
func thumbprint(public ed25519.PublicKey) string {
	h := sha256.Sum256([]byte(`{"crv":"Ed25519","kty":"OKP","x":"` + base64.RawURLEncoding.EncodeToString(public) + `"}`))
	return base64.RawURLEncoding.EncodeToString(h[:])
}

// Key signs reservations.
type Key struct {
	ID      string // its JWK thumbprint
	Private ed25519.PrivateKey
	Public  ed25519.PublicKey
}

// Ring is a set ready to be used.
type Ring struct {
	Keys   []Key // the first one signs
	tokens [][sha256.Size]byte
}

// IsCheckoutToken says whether a bearer token claims to be the checkout's, as opposed to a buyer's.
func IsCheckoutToken(token string) bool { return strings.HasPrefix(token, tokenPrefix) }

// Checkout says whether the token is one of the checkout's. The time it takes tells nothing of the tokens.
func (r *Ring) Checkout(token string) bool {
	h, ok := sha256.Sum256([]byte(token)), 0
	for i := range r.tokens {
		ok |= subtle.ConstantTimeCompare(h[:], r.tokens[i][:])
	}
	return ok == 1
}

// JWKS gives the public keys (RFC 7517).
func (r *Ring) JWKS() []byte {
	type jwk struct {
		KeyType   string `json:"kty"`
		Curve     string `json:"crv"`
		Use       string `json:"use"`
		Algorithm string `json:"alg"`
		ID        string `json:"kid"`
		X         string `json:"x"`
	}
	all := struct {
		Keys []jwk `json:"keys"`
	}{}
	for _, k := range r.Keys {
		all.Keys = append(all.Keys, jwk{"OKP", "Ed25519", "sig", "EdDSA", k.ID, base64.RawURLEncoding.EncodeToString(k.Public)})
	}
	b, err := json.Marshal(all)
	if err != nil {
		panic(fmt.Sprintf("encoding public keys: %v", err)) // of plain values
	}
	return b
}

// File is a file of keys that is read again when it changes: a mounted Secret does when the keys are rotated.
type File struct {
	path string
	last string
	ring atomic.Pointer[Ring]
}

// Open reads the file.
func Open(path string) (*File, error) {
	f := &File{path: path}
	_, err := f.read()
	return f, err
}

// Ring is the newest.
func (f *File) Ring() *Ring { return f.ring.Load() }

func (f *File) read() (changed bool, err error) {
	text, err := os.ReadFile(f.path)
	if err != nil {
		return false, fmt.Errorf("reading the keys: %w", err)
	}
	if string(text) == f.last {
		return false, nil
	}
	set, err := Decode(text)
	if err != nil {
		return false, fmt.Errorf("reading the keys in %s: %w", f.path, err)
	}
	ring, err := set.ring()
	if err != nil {
		return false, err
	}
	f.last = string(text)
	f.ring.Store(ring)
	return true, nil
}

// Follow reads the file again and again until the context ends. A file that cannot be read changes nothing.
func (f *File) Follow(ctx context.Context, every time.Duration, log *slog.Logger) {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	failing := false
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		changed, err := f.read()
		switch {
		case err != nil && !failing:
			log.Warn("could not read the keys again, those known stay in use", "error", err)
		case changed:
			log.Info("read new keys", "signing", f.Ring().Keys[0].ID)
		}
		failing = err != nil
	}
}
