package admission

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// solve does what a browser does.
func solve(t testing.TB, p Puzzle, change func(*altchaSolution)) string {
	t.Helper()
	for n := range p.MaxNumber + 1 {
		if puzzleHash(p.Salt, n) == p.Challenge {
			s := altchaSolution{p.Algorithm, p.Challenge, n, p.Salt, p.Signature}
			if change != nil {
				change(&s)
			}
			text, err := json.Marshal(s)
			if err != nil {
				t.Fatal(err)
			}
			return base64.StdEncoding.EncodeToString(text)
		}
	}
	t.Fatal("the puzzle has no solution")
	return ""
}

func TestProofOfWork(t *testing.T) {
	work := &ProofOfWork{Keys: keyFile(t, theKeys), Difficulty: 1000}
	rotated := &ProofOfWork{Keys: keyFile(t, theKeys.Rotate(2)), Difficulty: 1000}
	foreign := &ProofOfWork{Keys: keyFile(t, theKeys.Rotate(2).Rotate(3).Rotate(4)), Difficulty: 1000}
	ann := &Caller{Buyer: "ann"}
	now := time.Now()
	puzzle := work.New("ann", now)
	if err := rotated.Check(t.Context(), solve(t, puzzle, nil), ann); err != nil {
		t.Errorf("a pod with newer keys says %v", err)
	}
	if again := work.New("ann", now); again.Salt == puzzle.Salt {
		t.Error("two puzzles are the same")
	}
	for name, tt := range map[string]struct {
		solution string
		caller   *Caller
		want     error
	}{
		"solved":              {solve(t, puzzle, nil), ann, nil},
		"solved, sent again":  {solve(t, puzzle, nil), ann, nil},
		"another buyer's":     {solve(t, puzzle, nil), &Caller{Buyer: "bob"}, ErrChallenge},
		"another number":      {solve(t, puzzle, func(s *altchaSolution) { s.Number++ }), ann, ErrChallenge},
		"an easier challenge": {solve(t, puzzle, func(s *altchaSolution) { s.Number = 0; s.Challenge = puzzleHash(s.Salt, 0) }), ann, ErrChallenge},
		"a later end":         {solve(t, puzzle, func(s *altchaSolution) { s.Salt = s.Salt[:len(s.Salt)-1] + "9" }), ann, ErrChallenge},
		"another algorithm":   {solve(t, puzzle, func(s *altchaSolution) { s.Algorithm = "MD5" }), ann, ErrChallenge},
		"expired":             {solve(t, work.New("ann", now.Add(-challengeLasts-2*time.Second)), nil), ann, ErrChallenge},
		"of unknown keys":     {solve(t, foreign.New("ann", now), nil), ann, ErrChallenge},
		"a digit moved":       {solve(t, puzzle, func(s *altchaSolution) { s.Salt += "1"; s.Number /= 10 }), ann, ErrChallenge},
		"nothing":             {"", ann, ErrChallenge},
		"no base64":           {"%%%", ann, ErrChallenge},
		"no JSON":             {"AAAA", ann, ErrChallenge},
		"too long":            {strings.Repeat("A", 4096), ann, ErrChallenge},
	} {
		t.Run(name, func(t *testing.T) {
			if err := work.Check(t.Context(), tt.solution, tt.caller); !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
		})
	}
}

func TestSiteVerify(t *testing.T) {
	asked := 0
	service := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked++
		if r.FormValue("secret") != "s3cret" || r.FormValue("remoteip") != "198.51.100.7" {
			t.Errorf("asked with %v", r.Form)
		}
		switch r.FormValue("response") {
		case "down":
			w.WriteHeader(http.StatusBadGateway)
		case "good":
			_, _ = w.Write([]byte(`{"success":true,"hostname":"shop.example"}`))
		default:
			_, _ = w.Write([]byte(`{"success":false,"error-codes":["invalid-input-response"]}`))
		}
	}))
	defer service.Close()
	check := NewSiteVerify(service.URL, func() (string, error) { return "s3cret", nil })
	ann := &Caller{Buyer: "ann", Address: netip.MustParseAddr("198.51.100.7")}
	if err := check.Check(t.Context(), "", ann); !errors.Is(err, ErrChallenge) || asked != 0 {
		t.Errorf("nothing sent: %v, asked %d times", err, asked)
	}
	if err := check.Check(t.Context(), "bad", ann); !errors.Is(err, ErrChallenge) {
		t.Errorf("a bad token: %v", err)
	}
	if err := check.Check(t.Context(), "down", ann); err == nil || errors.Is(err, ErrChallenge) {
		t.Errorf("a service that is down: %v", err)
	}
	if err := check.Check(t.Context(), "good", ann); err != nil {
		t.Errorf("a good token: %v", err)
	}
	before := asked
	if err := check.Check(t.Context(), "good", ann); err != nil || asked != before {
		t.Errorf("again: %v, the service, which accepts a token once, was asked %d times more", err, asked-before)
	}
	broken := NewSiteVerify(service.URL, func() (string, error) { return "", errors.New("no such file") })
	if err := broken.Check(t.Context(), "good", ann); err == nil || errors.Is(err, ErrChallenge) {
		t.Errorf("without a secret: %v", err)
	}
}
