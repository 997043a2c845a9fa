package admission

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"time"

	lru "github.com/hashicorp/golang-lru/v2/expirable"

	"flashsale.dev/operator/reserver/keys"
)

// ErrChallenge means that the solution proves nothing: it is missing, wrong, too old, or somebody else's.
var ErrChallenge = errors.New("the challenge is not solved")

// Challenge is what a buyer has to do before a claim, which costs a person nothing and a thousand bots much.
type Challenge interface {
	// Check accepts the solution that the buyer sent, or fails with ErrChallenge. Any other error says that it could not be
	// found out.
	Check(ctx context.Context, solution string, c *Caller) error
}

// ProofOfWork makes a browser compute hashes, in the format of ALTCHA (https://altcha.org/docs/v2/server-integration/), whose
// widget can solve it. A challenge is made for one buyer and is good until it expires, at every pod: nothing is remembered, and
// what one buyer has solved is of no use to another.
type ProofOfWork struct {
	Keys *keys.File
	// Difficulty is how many numbers there are to try; half as many hashes are computed on average.
	Difficulty int64
}

// challengeLasts is long enough to solve one before the start and press Buy after it.
const challengeLasts = 10 * time.Minute

// Puzzle is a challenge as ALTCHA's clients know it: to find the number from 0 to MaxNumber that, written after Salt, hashes to
// Challenge.
type Puzzle struct {
	Algorithm string `json:"algorithm"`
	Challenge string `json:"challenge"`
	MaxNumber int64  `json:"maxnumber"`
	Salt      string `json:"salt"`
	Signature string `json:"signature"`
}

// altchaSolution is what clients send, as JSON in base64.
type altchaSolution struct {
	Algorithm string `json:"algorithm"`
	Challenge string `json:"challenge"`
	Number    int64  `json:"number"`
	Salt      string `json:"salt"`
	Signature string `json:"signature"`
}

// New makes a puzzle for a buyer.
func (p *ProofOfWork) New(buyer string, now time.Time) Puzzle {
	n, err := rand.Int(rand.Reader, big.NewInt(p.Difficulty+1))
	if err != nil {
		panic(fmt.Sprintf("choosing a number: %v", err)) // crypto/rand never fails
	}
	salt := rand.Text() + "?expires=" + strconv.FormatInt(now.Add(challengeLasts).Unix(), 10)
	challenge := puzzleHash(salt, n.Int64())
	return Puzzle{Algorithm: "SHA-256", Challenge: challenge, MaxNumber: p.Difficulty, Salt: salt,
		Signature: puzzleSignature(p.Keys.Ring().Keys[0], challenge, buyer)}
}

func puzzleHash(salt string, number int64) string {
	h := sha256.Sum256([]byte(salt + strconv.FormatInt(number, 10)))
	return hex.EncodeToString(h[:])
}

func puzzleSignature(key keys.Key, challenge, buyer string) string {
	derived := sha256.Sum256(append([]byte("flashsale challenge\n"), key.Private.Seed()...))
	mac := hmac.New(sha256.New, derived[:])
	_, _ = mac.Write([]byte(challenge + "\n" + buyer))
	return hex.EncodeToString(mac.Sum(nil))
}

// Check implements Challenge.
func (p *ProofOfWork) Check(_ context.Context, solution string, c *Caller) error {
	text, err := base64.StdEncoding.DecodeString(solution)
	var s altchaSolution
	if err != nil || len(solution) > 2048 || json.Unmarshal(text, &s) != nil || s.Algorithm != "SHA-256" || s.Number < 0 || s.Number > p.Difficulty {
		return ErrChallenge
	}
	random, expires, found := strings.Cut(s.Salt, "?expires=")
	at, err := strconv.ParseInt(expires, 10, 64)
	// The salt is not signed, the hash over it is: digits moved from the number to the time would hash to the same.
	if len(random) != len(rand.Text()) || !found || err != nil || len(expires) != 10 || time.Now().Unix() > at || puzzleHash(s.Salt, s.Number) != s.Challenge {
		return ErrChallenge
	}
	for _, key := range p.Keys.Ring().Keys {
		if hmac.Equal([]byte(puzzleSignature(key, s.Challenge, c.Buyer)), []byte(s.Signature)) {
			return nil
		}
	}
	return ErrChallenge
}

// SiteVerify asks a service of the kind of Turnstile, hCaptcha and reCAPTCHA, all of which have the same endpoint.
type SiteVerify struct {
	url    string
	secret func() (string, error)
	client *http.Client
	passed *lru.LRU[string, struct{}] // buyers: a solution is accepted once, and the buyer may press again
}

// NewSiteVerify makes one; secret is read each time, so that it may be rotated.
func NewSiteVerify(endpoint string, secret func() (string, error)) *SiteVerify {
	return &SiteVerify{url: endpoint, secret: secret, client: &http.Client{Timeout: 3 * time.Second},
		passed: lru.NewLRU[string, struct{}](1<<16, nil, challengeLasts)}
}

// Check implements Challenge.
func (s *SiteVerify) Check(ctx context.Context, solution string, c *Caller) error {
	if s.passed.Contains(c.Buyer) {
		return nil
	}
	if solution == "" || len(solution) > 4096 {
		return ErrChallenge
	}
	secret, err := s.secret()
	if err != nil {
		return fmt.Errorf("reading the secret of the challenge's service: %w", err)
	}
	form := url.Values{"secret": {secret}, "response": {solution}}
	if c.Address != (netip.Addr{}) {
		form.Set("remoteip", c.Address.String())
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url, strings.NewReader(form.Encode()))
	if err != nil {
		return fmt.Errorf("asking the challenge's service: %w", err)
	}
	request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	answer, err := s.client.Do(request)
	if err != nil {
		return fmt.Errorf("asking the challenge's service: %w", err)
	}
	defer func() { _ = answer.Body.Close() }()
	var verdict struct {
		Success bool `json:"success"`
	}
	if err := json.NewDecoder(io.LimitReader(answer.Body, 64<<10)).Decode(&verdict); err != nil || answer.StatusCode != http.StatusOK {
		return fmt.Errorf("asking the challenge's service: status %d, error %w", answer.StatusCode, err)
	}
	if !verdict.Success {
		return ErrChallenge
	}
	s.passed.Add(c.Buyer, struct{}{})
	return nil
}
