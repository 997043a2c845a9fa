package keys

import (
	"crypto/ed25519"
	"encoding/json"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func ringOf(t *testing.T, s Set) *Ring {
	t.Helper()
	r, err := s.ring()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// At each moment of a rotation, whoever knows the set before it and whoever knows the one after understand each other.
func TestRotation(t *testing.T) {
	first := New(3)
	second := first.Rotate(4)
	third := second.Rotate(5)
	if second.Generation != 4 || second.Current != first.Next || *second.Previous != first.Current || *third.Previous != first.Next {
		t.Fatal("the keys were not moved on")
	}
	for name, tt := range map[string]struct {
		ring  *Ring
		token string
		want  bool
	}{
		"the current one":                {ringOf(t, first), first.Current.CheckoutToken, true},
		"a checkout that was told first": {ringOf(t, first), second.Current.CheckoutToken, true},
		"a pod that was told first":      {ringOf(t, second), first.Current.CheckoutToken, true},
		"one rotation further":           {ringOf(t, third), first.Current.CheckoutToken, false},
		"part of one":                    {ringOf(t, first), first.Current.CheckoutToken[:40], false},
		"none":                           {ringOf(t, first), "", false},
	} {
		if got := tt.ring.Checkout(tt.token); got != tt.want {
			t.Errorf("%s: accepted %t", name, got)
		}
	}
	published := string(ringOf(t, first).JWKS())
	signs := ringOf(t, second).Keys[0]
	if !strings.Contains(published, signs.ID) {
		t.Error("the next key was not published before it signs")
	}
	message := []byte("m")
	if !ed25519.Verify(ringOf(t, first).Keys[1].Public, message, ed25519.Sign(signs.Private, message)) {
		t.Error("the key published is another")
	}
	var set struct{ Keys []map[string]string }
	if err := json.Unmarshal(ringOf(t, third).JWKS(), &set); err != nil || len(set.Keys) != 3 {
		t.Fatalf("%v, %v", set, err)
	}
	for _, k := range set.Keys {
		if k["kty"] != "OKP" || k["alg"] != "EdDSA" || k["d"] != "" || k["kid"] == "" {
			t.Errorf("published %v", k)
		}
	}
}

func TestFilesThatAreNoKeys(t *testing.T) {
	set := New(1)
	good := string(set.Encode())
	if _, err := Decode([]byte(good)); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"nothing":           "",
		"an empty object":   "{}",
		"half of it":        good[:len(good)/2],
		"a short seed":      strings.Replace(good, set.Current.SigningSeed, "AAAA", 1),
		"no token":          strings.Replace(good, set.Next.CheckoutToken, "", 1),
		"another's token":   strings.Replace(good, set.Next.CheckoutToken, "sk_live_"+strings.Repeat("a", 40), 1),
		"a guessable token": strings.Replace(good, set.Current.CheckoutToken, "fsc_admin", 1),
	} {
		_, err := Decode([]byte(text))
		if err == nil {
			t.Errorf("%s was accepted", name)
		} else if strings.Contains(err.Error(), set.Current.CheckoutToken) || strings.Contains(err.Error(), set.Current.SigningSeed) {
			t.Errorf("%s: the error tells the keys", name)
		}
	}
}

// A file that changes is read again; one that is broken meanwhile changes nothing.
func TestFollow(t *testing.T) {
	path := filepath.Join(t.TempDir(), FileName)
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Open(path); err == nil {
		t.Error("a file that is not there was opened")
	}
	set := New(1)
	write(string(set.Encode()))
	file, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	go file.Follow(t.Context(), time.Millisecond, slog.New(slog.NewTextHandler(io.Discard, nil)))
	write("broken")
	next := set.Rotate(2)
	if file.Ring().Checkout(next.Next.CheckoutToken) {
		t.Error("a token that is none was accepted")
	}
	write(string(next.Encode()))
	for deadline := time.Now().Add(10 * time.Second); !file.Ring().Checkout(next.Next.CheckoutToken); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the file was not read again")
		}
	}
}
